"""The Triton functions that SGLang's recurrent layers call, in plain torch."""
