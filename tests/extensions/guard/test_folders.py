"""Folders that a request may name."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang.srt.managers.io_struct import ConfigureLoggingReq, ProfileReq

from sglang_hybrid.extensions.guard.folders import PROFILES, check_folders
from sglang_hybrid.serving.requests.errors import Refused


@pytest.mark.parametrize("field", ["dump_requests_folder", "crash_dump_folder"])
def test_only_who_has_the_admin_key_names_a_folder_for_dumps(field: str) -> None:
    request = ConfigureLoggingReq(**{field: "/anywhere"})
    check_folders(request, "adm")
    check_folders(ConfigureLoggingReq(**{field: ""}), None)  # turns it off
    with pytest.raises(Refused, match=f"{field} is '/anywhere'; .* --admin-api-key") as refused:
        check_folders(request, None)
    assert refused.value.status_code == 403


def test_profiles_stay_in_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROFILES, str(tmp_path))
    (tmp_path / "out").symlink_to("/")
    check_folders(None, None)
    check_folders(ProfileReq(), None)
    check_folders(ProfileReq(output_dir=str(tmp_path / "mine")), None)
    for folder in ("/anywhere", "relative", f"{tmp_path}/../other", f"{tmp_path}/out/etc", "\0"):
        with pytest.raises(Refused, match=r"output_dir is .* must be in"):
            check_folders(ProfileReq(output_dir=folder), None)
        check_folders(ProfileReq(output_dir=folder), "adm")
