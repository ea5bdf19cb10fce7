"""The entry of `streamlit run dashboard`. The address names the run (`?run=`); without one the page lists the runs."""

from __future__ import annotations

import streamlit as st

from unskew.dashboard import run_list, run_page, theme

st.set_page_config(page_title="Unskew", page_icon=str(theme.ICON), layout="wide", initial_sidebar_state="collapsed")
theme.apply()
with st.container(horizontal=True, vertical_alignment="center", gap="medium", key="header"):
    theme.brand()
    chosen = run_list.choose()
    if chosen is not None:
        run_page.controls(chosen)
if chosen is None:
    run_list.show()
else:
    run_page.show(chosen)
