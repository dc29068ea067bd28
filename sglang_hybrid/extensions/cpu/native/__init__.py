"""C++ forms of what plain torch does slowly on a CPU: built on the user's machine, loaded once.

The sources are in ``kernels/native``. Each function has a plain twin in torch, which serves where
there is no compiler, and with which it is compared.
"""
