"""The Streamlit app: reads the log, writes commands."""
