"""Texts that the demo pair learns from.

attributes     attributes of entities, with their sentences and questions
corpus         generated documents and conversations
entities       invented places, people, ships and things
names          invented names and random values, split into train and held out
phrases        fixed sentences of the corpus
squad          SQuAD questions as conversations
"""
