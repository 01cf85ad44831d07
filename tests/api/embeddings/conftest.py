"""The node that all tests share is the server of these."""

from tests.api.real import http as http
from tests.api.real import url as url
