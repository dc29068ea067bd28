"""Why was a prompt not hit further? What is noted for the answer, and the answer.

No decision of the cache depends on anything here.
"""
