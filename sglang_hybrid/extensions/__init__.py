"""Extensions: loaded only when a flag or a request asks for them. The product names none of them in
an import (`core/extensions.py`); they import the product.
"""
