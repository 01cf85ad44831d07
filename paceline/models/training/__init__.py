"""Training of the demo pair.

architecture   a lean Llama with transformers' parameter names
attributes     attributes of entities, with their sentences and questions
average        mean of several models' weights
batches        conversations as token ids and loss weights
corpus         generated documents and conversations
data_parallel  gradient exchange between training processes
entities       invented places, people, ships and things
evaluate       exact-match scores on held-out facts and SQuAD
model_growth   the cloud model, grown from the device model
names          invented names and random values, split into train and held out
optimizer      Muon and AdamW
phrases        fixed sentences of the corpus
squad          SQuAD questions as conversations
train          the training loop and its curriculum
vocabulary     the tokenizer
"""
