"""Asyncio, threads and clocks: drives any machine on any engine and link, for real or in the virtual `world`."""
