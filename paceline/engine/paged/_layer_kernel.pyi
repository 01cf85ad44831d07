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
