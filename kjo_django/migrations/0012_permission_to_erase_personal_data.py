from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("kjo_django", "0011_keys_of_held_jobs")]

    operations = [
        migrations.AlterModelOptions(
            name="job",
            options={
                "default_permissions": ("view", "delete"),
                "ordering": ("-id",),
                "permissions": (
                    ("enqueue_job", "Can enqueue jobs"),
                    ("retry_job", "Can requeue jobs"),
                    ("cancel_job", "Can cancel jobs"),
                    ("view_payload", "Can see payloads, results and tracebacks"),
                    ("erase_personal_data", "Can erase what is kept of a person"),
                ),
                "verbose_name": "job",
                "verbose_name_plural": "jobs",
            },
        ),
    ]
