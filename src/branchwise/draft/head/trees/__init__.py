"""The trees of a head, grown and laid out where it runs: on a GPU ahead of the host, on a host as large as pays."""
