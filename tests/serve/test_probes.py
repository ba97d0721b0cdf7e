"""Probes and proxies: HEAD, hosts in capitals, and requests by HTTP/1.0 without a host."""

from __future__ import annotations

import pytest
from helpers.threads import one_thread

from .test_cors import KEY, served

__all__ = ["one_thread"]


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/v1/models/tiny"])
def test_what_answers_to_get_answers_to_head(path: str) -> None:
    with served() as client:
        assert client.head(path, headers=KEY).status_code == 200
        assert client.head("/v1/completions", headers=KEY).status_code == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [("LOCALHOST:8000", 200), ("[::1]:8000", 200), ("localhost.example", 421), ("", 421)],
)
def test_the_host_is_a_name_of_this_machine_in_any_case(host: str, status: int) -> None:
    with served() as client:
        assert client.get("/health", headers={"Host": host}).status_code == status


def test_a_request_without_a_host_comes_from_no_browser() -> None:
    with served() as client:
        request = client.build_request("GET", "/health")
        del request.headers["host"]
        assert client.send(request).status_code == 200


@pytest.mark.parametrize("temperature", [1e-7, 1e-300])
def test_an_error_about_a_setting_names_its_field(temperature: float) -> None:
    with served() as client:
        asked = {"prompt": "a", "temperature": temperature}
        answer = client.post("/v1/completions", json=asked, headers=KEY)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")
