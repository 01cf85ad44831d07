"""Pure algorithms on numpy and the standard library: no clock, socket, thread, global randomness or model inside."""
