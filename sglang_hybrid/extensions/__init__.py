"""Extensions: loaded only when a flag or a request asks for them, but for the guard, which is on by
default. The product names none of them in an import (`core/extensions.py`); they import the
product.
"""
