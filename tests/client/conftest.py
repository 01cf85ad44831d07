"""The scripted service of the API's tests, for the client's tests."""

from tests.api.conftest import _shared as _shared
from tests.api.conftest import service as service
from tests.api.conftest import url as url
