"""A simulated Metal framework, on which csrc/gpu/metal.mm compiles and runs on Linux."""
