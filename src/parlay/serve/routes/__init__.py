"""The operations, a file for each group; each makes an `APIRouter`."""
