"""The prefix cache inside SGLang. The only room that knows SGLang's tree."""
