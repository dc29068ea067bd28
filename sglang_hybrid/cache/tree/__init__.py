"""SGLang's tree and its components, with our admission and our victims."""
