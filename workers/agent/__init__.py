"""What a worker tells Redis about itself."""
