"""The program of scripts/gpu_check.sh: steps in processes of their own, and a table of what they
found.

`__main__` chooses the steps, `steps` runs them within their time and prints the table. A step is a
module: `kernels` (our Triton kernels against their definitions, how often they are compiled, also
under compute-sanitizer), `timings` (what two states cost beside a layer's prefill), `models` (a
server with a tiny model: what it has chosen, and hits against cold prefills). It reports what it
found with `findings.tell`.
"""
