"""Models of the Hugging Face hub: their names, fetching them, and what of them lies on this machine.

download   a whole model
cache      the models in the hub's cache
"""
