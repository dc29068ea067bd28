"""The program of scripts/demo.sh: the same traffic to a server with our cache and to one with
SGLang's.

`traffic` plans what is sent and when, `results` makes the table, `__main__` starts the servers and
drives them.
"""
