def norm(
    counter: int,
    is_half: int,
    rows: int,
    width: int,
    eps: float,
    x: int,
    added: int,
    weight: int,
    total: int,
    out: int,
    /,
) -> None: ...
def rotate(
    counter: int, is_half: int, rows: int, stride: int, heads: int, dim: int, x: int, cos: int, sin: int, /
) -> None: ...
def gate(counter: int, is_half: int, rows: int, width: int, x: int, out: int, /) -> None: ...
def attend(
    counter: int,
    is_half: int,
    num_items: int,
    query_stride: int,
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    block_size: int,
    window: int,
    scale: float,
    softcap: float,
    query: int,
    keys: int,
    values: int,
    items: int,
    out: int,
    /,
) -> None: ...
