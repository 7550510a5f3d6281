"""The routes that all protocols share, one file per group; each makes an `APIRouter`."""
