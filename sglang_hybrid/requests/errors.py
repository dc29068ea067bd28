"""The error of a request that is not done."""

from http import HTTPStatus


class Refused(ValueError):
    """The server does not do what it was asked. status_code: of the HTTP answer."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status_code = status
