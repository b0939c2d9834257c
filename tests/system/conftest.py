"""These tests read compiled programs: they are compiled as users' are."""

from tests.support.compiling import as_users_compile  # noqa: F401
