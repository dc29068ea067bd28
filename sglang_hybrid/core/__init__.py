"""What a cache decides: costs, candidates, victims, reuse, admission. Imports neither torch nor
sglang.
"""
