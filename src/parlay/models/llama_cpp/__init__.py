"""llama.cpp as a runner, through the package llama-cpp-python."""
