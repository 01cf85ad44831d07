"""The link on real sockets: dialling, transports, emulated networks."""
