"""Models of the Hugging Face hub: their names, fetching them, and what of them lies on this machine.

names      a name with its revision; names of other programs' models, refused by what they are
selection  which files of a repository make a model that can be run
transfer   one file, continued where it was cut, and checked
download   a whole model
cache      the models in the hub's cache
folders    a model's folder, by its path or its name on the hub
facts      what a model's folder says of itself
"""
