"""HTTP: paths, the door in front of them, connections."""
