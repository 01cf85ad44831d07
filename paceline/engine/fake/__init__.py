"""The engine without a model: a seeded table over bytes, for tests, the simulator and `--model fake`."""
