"""Builds the engine images of the lab, without dockerd, and pushes them into its registry."""
