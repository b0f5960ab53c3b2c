"""Containers of services that have no layers: docker, podman, Kubernetes, E2B. Their changes are copied as archives."""
