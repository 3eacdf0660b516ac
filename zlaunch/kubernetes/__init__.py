"""Makes manifests for Kubernetes from typed values."""
