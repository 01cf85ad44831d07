"""Several models behind one `Service`: one node for each that is loaded, with documents, keys and admission in common.

slot     one model: loaded at the first call, kept while it is used, unloaded
loads    what their engines have done, together
memory   which are unloaded, and when
service  the `Service` over all of them
"""
