"""The trees of a head, grown and laid on its own device: on a GPU ahead of the host, on a host as large as pays."""
