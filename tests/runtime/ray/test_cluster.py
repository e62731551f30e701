import socket

import pytest

from realign.runtime.ray.cluster import check_answers


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1", ":6379", "127.0.0.1:port"])
def test_what_is_no_address_is_told(address: str) -> None:
    with pytest.raises(ValueError, match=r"runtime\.address must be HOST:PORT, ray://HOST:PORT, auto or null"):
        check_answers(address)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_told_at_once(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_answers(f"{scheme}127.0.0.1:{port}")
    with pytest.raises(ValueError, match=rf"runtime\.address='{scheme}127\.0\.0\.1:{port}': nobody answers there"):
        check_answers(f"{scheme}127.0.0.1:{port}")
    with pytest.raises(ValueError, match="nobody answers there"):
        check_answers(f"{scheme}127.0.0.1:99999")
