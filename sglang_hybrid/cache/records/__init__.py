"""`core`'s records of SGLang's tree, and of the copies below the device."""
