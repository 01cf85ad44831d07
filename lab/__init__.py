"""Research beside the product, outside the wheel: what papers, benches and training need and no user carries.

simulation     hosts, network and answers in virtual time, driving the machines that serve
baselines      what papers describe and benches compare with
fleet          servers over one database, killed, stopped and replaced while they answer
crowd          a hundred thousand devices in virtual time, on the links that are served
many_links     thousands of devices on them at once, and what the death of one costs
published      strategies as papers describe them, for requests to a real server
scheduling     other policies for the scheduler of workflows
training       of the demonstration's models
demo_pair      their answers, side by side and together
engines        engines around another engine
torch_kernels  the twin in torch of the attention kernels
configs        configurations of machines by the names of their fields
replay         a log of machines, run again
real_vllm      one behind a node: the same texts, speeds, drafts, coins, and what is killed
grid           what `auto` takes, beside every other way to the same text
walk           the files that a request walks through
link_document  the generator of openapi/link.md
openapi        of openapi/openapi.json
client_shapes  the generator of paceline/api/official.json
"""
