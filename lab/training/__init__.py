"""Training of the demonstration's models, and of the score of difficulty.

architecture   a lean Llama with transformers' parameter names
average        mean of several models' weights
batches        conversations as token ids and loss weights
data_parallel  gradient exchange between training processes
difficulty     answers of two models, and when the smaller one's will do
evaluate       exact-match scores on held-out facts and SQuAD
model_growth   the cloud model, grown from the device model
optimizer      Muon and AdamW
reading        the reader's training
texts          the texts that are learnt from
train          the training loop and its curriculum
vocabulary     the tokenizer
"""
