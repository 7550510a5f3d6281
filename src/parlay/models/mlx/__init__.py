"""Apple's MLX as a runner, with the models of the package mlx-lm."""
