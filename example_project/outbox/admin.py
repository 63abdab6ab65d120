"""The emails in the admin."""

from django.contrib import admin

from example_project.outbox.models import Email


@admin.register(Email)
class EmailAdmin(admin.ModelAdmin):
    """Set an email's state back to Pending and it is sent again."""

    list_display = ("recipient", "subject", "state", "sent_at")
    list_filter = ("state",)
    search_fields = ("recipient",)
