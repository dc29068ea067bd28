"""What a scheduler answers when it cannot do what it was asked; SGLang's own kind of message."""

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types


class ControlFailed(BaseReq):
    """The request of type `request` was not done, for the reason `message`.

    status: the HTTP status of the answer, 4xx if it was refused, 500 if it failed.
    """

    request: str
    message: str
    status: int


hook_custom_types(ControlFailed)
