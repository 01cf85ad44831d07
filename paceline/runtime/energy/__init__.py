"""Energy of this machine: the meters it offers, which of them is used, and what the device remembers of its budget.

- `rapl`, `nvml`, `battery`: what hardware and system measure
- `choice`: the meter of a side, found at start-up or named by a setting
- `debt_file`: the energy spent beyond the budget, kept in the state directory
"""
