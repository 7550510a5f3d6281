"""Apple's MLX as a runner, with the package mlx-lm's models."""
