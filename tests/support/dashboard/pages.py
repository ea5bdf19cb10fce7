"""The dashboard's page as a browser would get it, without one."""

from __future__ import annotations

from pathlib import Path

from streamlit.testing.v1 import AppTest

import unskew.dashboard

FOLDER = Path(str(unskew.dashboard.__file__)).parent


def page(run: str | None = None) -> AppTest:
    """The dashboard as a browser would get it, at ?run=`run`."""
    app = AppTest.from_file(str(FOLDER / "streamlit_app.py"), default_timeout=30)
    if run is not None:
        app.query_params["run"] = run
    app.run()
    assert not app.exception, app.exception
    return app


def text(app: AppTest) -> str:
    """Everything written as HTML on the page."""
    return "\n".join(str(part.proto.body) for part in app.get("html"))
