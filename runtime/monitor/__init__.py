"""What a training run tells about itself."""
