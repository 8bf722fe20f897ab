"""What `bench.growth` measures, a module for each layer, and how."""
