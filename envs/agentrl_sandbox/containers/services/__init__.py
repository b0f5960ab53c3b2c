"""Containers of engines that have no layers of ours: docker and podman. Their changes are copied as archives."""
