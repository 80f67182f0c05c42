"""Sending an export to the Hugging Face hub, or to whatever HF_ENDPOINT names."""

from __future__ import annotations

from pathlib import Path

from pretrain.errors import UserError


def push(directory: Path, repository: str, public: bool = False) -> str:
    """Make the repository if it is not there, and upload every file in one commit; returns its address.

    Args:
        repository: OWNER/NAME.
        public: of a repository that is made.

    Raises:
        UserError: the hub refuses, or cannot be reached; the export stays where it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    api = HfApi()
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository, folder_path=directory, commit_message=f"Export of {directory.name}"
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"--push-to-hub {repository}: {reason}; {directory} is complete, push it again with "
            f"`hf upload {repository} {directory}`"
        ) from error
    return str(done.commit_url)
