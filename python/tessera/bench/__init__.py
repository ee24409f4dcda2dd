"""`python -m tessera.bench`: Tessera's speed beside that of every other attention that can be imported here.

    python -m tessera.bench                        the whole grid, on the GPU if there is one
    python -m tessera.bench --quick                a few minutes' worth of it
    python -m tessera.bench --compare OLD.json     ... and what got slower since
    python -m tessera.bench --train-step           tokens/s of a GPT's training step instead
    python -m tessera.bench --host-time            what a tiny call costs the host instead

What is measured, and how:

- `sides.py`: who takes part, and why someone does not.
- `cells.py`: the grid, the check of every result against float32, the measurement of a cell.
- `timing.py`: how sides take turns on a GPU and on a CPU.
- `train_step.py`: forward, backward and AdamW of a GPT, with one attention after the other.
- `host_time.py`: many tiny calls, beside PyTorch's.
- `report.py`, `plots.py`: tables, JSON, comparisons, figures.
"""
