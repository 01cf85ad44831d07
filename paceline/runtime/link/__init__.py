"""The link on real connections.

connection  the link machine on a transport, clock and event loop; a device that reconnects, a cloud's WebSocket route
transport   WebSockets of the `websockets` client and of Starlette
emulation   delay, rate and loss of an emulated network
"""
